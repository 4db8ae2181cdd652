"""The dialects of this package, each a folder or a file: `api.registry` lists them, nothing else imports one."""

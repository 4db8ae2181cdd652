"""Which replica of a fleet answers a request: for routers of any kind; nothing here knows one."""

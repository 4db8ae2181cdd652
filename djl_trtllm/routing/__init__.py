"""The choice of the replica that answers a request: for routers of any kind; nothing here knows one."""

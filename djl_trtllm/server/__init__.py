"""HTTP: bytes in, bytes out. What a request means stands in `api`, what becomes of it in `service`."""

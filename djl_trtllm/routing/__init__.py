"""The choice of the replica that answers a request, and how many there are: of any fleet; nothing here knows Ray."""

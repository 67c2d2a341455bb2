"""HTTP itself: sockets, connections, reading a request, the one event stream, errors as answers."""

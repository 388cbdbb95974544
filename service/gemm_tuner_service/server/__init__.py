"""The sockets and processes of the service: listening, TLS, deadlines of connections."""

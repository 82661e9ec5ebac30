"""Shells: processes, sockets, threads and files around the core."""

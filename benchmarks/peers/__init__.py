"""Our store and its rivals, side by side: each in its own process and environment, all over the same blocks.

`make bench-peers` sets the rivals up once and runs `python -m benchmarks.peers`.

    __main__.py tables.py   the benchmark: ratios round by round, bars, tables
    catalog.py              the systems that can take part
    rounds.py               systems in turns; what damaged bytes come back as
    process.py worker.py    the two sides of a worker: one system behind JSON lines
    environments.py         one environment for each rival
    damage.py               flips stored bytes
    system.py servers.py    what every adapter does, over which blocks; a system's own processes

The adapters are ours.py, lmcache_server.py, mooncake_store.py and plain_files.py. What runs in a worker imports the
standard library, numpy and that one system.
"""

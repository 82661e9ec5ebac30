"""A node in miniature, from one seed: the real client and the real daemon on a simulated machine.

    Process ── real Client, Link, Hit ──> SimEndpoint ── frames ──> SimListener ──> real Daemon, Service, Store
       └── reads and writes a real slab                      real DiskMoves, Disk, SlabFile ──> SimFile, SimIndex

`machine.py`   tasks, time, threads, files: what the real code stands on, with every fault they can have
`locks.py`     record locks, under the product's own code that takes them
`texts.py`     prompts whose KV follows from their tokens, so that a wrong byte shows without a model
`process.py`   an engine's process: what it does with the connector API, and what it must be given
`engines.py`   engines of several ranks, what schedulers tell them, and a ledger of what they have made together
`node.py`      the daemon: start, turns of its loop, death, restart, loss of power
`world.py`     all of them together, one thing at a time; the laws that hold after every step; the healing at the end
`faults.py`    what can go wrong
`report.py`    many worlds on all cores: `make sim`
`mutants.py`   each guard switched off in turn: `make mutants`

All code that could wait runs as a task (a greenlet), which gives way at every point where the real one could be
interrupted or made to wait. Which of them goes on next is the seed's choice, so a seed is a whole run.
"""

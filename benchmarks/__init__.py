"""Demo and benchmarks:

`python -m benchmarks.NAME`. What libraries read from the environment once is set here, first.
"""

import os

# No hub is ever asked: the model is on disk.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's threads yield at a barrier instead of spinning. A daemon shares these cores: with one busy process beside it,
# decoding on 2 cores took 0.15 s a token spinning and 0.07 s yielding, and alone the same 0.06 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""Engines: what runs the target model, behind one interface (`cloud.engines.base`)."""

import os

# A pass has hundreds of parallel regions with work for one thread in between. By libgomp's own choice the other threads
# spin for milliseconds, which uses up their time slices: beside one busy process they are then missing at each region,
# and a step of 70 ms takes 1200. This many turns outlast the usual gap. Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

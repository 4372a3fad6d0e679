"""The limits of what a user gives, and of what is shown, each with its reason.

``docs/limits.md`` says of the former what a user does who meets one.
"""

from __future__ import annotations

# Numbers.
LARGEST = 10**15  # more is a slip of the hand
SMALLEST = 1e-9  # of what is above zero: costs divide by it
HIGHEST_POWER = 8  # of a term of a formula, all its variables together
LONGEST_INTEGER = 4000  # digits: Python refuses to read more
LONGEST_RANGE = 2**16  # numbers: a short text cannot fill the memory
MOST_MS = 1e9  # that a thousand tokens may take by a profile: beyond that a number is a slip
LONGEST_MS = 1e12  # of a measured step: thirty years
MOST_GIB = 1e6  # of a measured rank

# Bytes of a file, each read whole: one that is no such file is refused before it fills the memory.
LARGEST_SETTINGS = 2**20  # a cluster or a training file has some twenty lines
LARGEST_PROFILE = 2**24  # measurements of every stage and length, or a line for every layer
LARGEST_DATA = 2**26  # what programs write: tables, densities, timelines, schedules, indices of weights
LARGEST_MANIFEST = 2**28  # a KiB for each of the most rows
LARGEST_MODULE = 2**24  # that is no part of an executable: ten seconds and half a GiB
LARGEST_PROGRAM = 2**26  # a module in an executable: some 650,000 instructions
LARGEST_PART = 2**28  # of an executable, and a plan that ranks send each other

# Clusters, clips and requests.
MOST_GPUS = 2**13  # of a cluster: more than any published run of a video model, and what is planned in a minute
MOST_ROWS = 2**18  # of a manifest that is listed; rows of Parquet are drawn from it
MOST_LINES = 2**21  # of a manifest: blank ones, and those of quoted texts, too
LONGEST_ROW = 2**22  # characters: a row is held whole, to show where it is wrong
MOST_COUNTED = 2**20  # frames, pixels, tokens of a row: larger numbers are typing mistakes
LATEST_START = 2**31  # the frame of a video at which a clip starts: two years of video
MOST_COPIES = 2**20  # that all rows' `clips` may ask for: a short file must not fill the memory
MOST_IN_BATCH = 2**14  # clips that are planned at once, in some 10 s
LOWEST_RATE, HIGHEST_RATE = 0.001, 1000  # frames a second: others are typing mistakes
LONGEST_ID = 200  # bytes: a file's name has 255, and endings
MOST_SAMPLING_STEPS = 10_000  # of a request: every outcome of a switch is looked at

# Executables and runs.
MOST_CLIPS = 2**19  # of an executable: more than a module's text holds
MOST_PASS_FILES = 32  # that an executable names: they are loaded before anything is run
MOST_MODEL_FILES = 256  # that a model file imports from its folder: more is a package
MOST_BATCHES = 2**12  # of an update: all their plans are held at once
MOST_CHECKED_RANKS = 32  # that the numerical check executes, as processes on this machine

# Pipelines: files of other programs, whose text is looked through row by row.
MOST_SCHEDULE_RANKS = 2**12
MOST_CELLS = 2**21  # of a schedule
MOST_LAYERS = 2**11  # of a profile of layers
MOST_EDGES = 2**16  # between them
LONGEST_LINE = 2**12  # characters of such a profile

# What is shown.
MOST_MISTAKES = 1000  # that are looked for: a text may hold a million, and a near name for each takes its time
MOST_ERRORS, LONGEST_ERRORS = 20, 10_000  # errors, and characters of them, at once
WIDEST_LINE = 240  # characters of a row
LONGEST_FIELD = 600  # characters of a field: more is no name that anybody gave
LONGEST_TEXT = 2 * LONGEST_FIELD  # characters of a message
LARGEST_SHOWN = 10**30  # of an integer
LONGEST_EXCEPTION = 400  # characters of what a user's dataset raised
MOST_NAMES = 3  # of clips or places in a message
MOST_WEIGHTS = 8  # names, or patterns of them, in a list of a message
TABLE_ROWS = 40  # in a terminal: a screen
MOST_TERMINAL_RANKS = 32  # rows of a timeline in a terminal: a screen
MOST_DRAWN_RANKS = 48  # of one Gantt: beyond, every second rank is drawn, or every third, ...
MOST_LINKS = 16  # of the critical path
MOST_CASCADES = 6  # of which a sentence is said each

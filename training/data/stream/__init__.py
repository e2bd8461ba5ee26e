"""Texts that are tokenized as they are read: `stream:NAME`.

Words: a lane gives one sequence to every step, so there are as many lanes as a step has sequences,
over all ranks and batches of it. Lane k has its own part of the documents, in shards (the files of
a set): its own shards where there are at least as many as lanes, else every n-th document of one
that n lanes share. A block is a run of a lane's documents that are shuffled among themselves. So
what is read in which order follows from the set, the seed and the number of lanes alone.
"""

PREFIX = "stream:"

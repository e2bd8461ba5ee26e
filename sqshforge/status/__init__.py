"""How far is a job? What the files of a run's folder tell, read without a server.

Words: a run is a folder with metrics.jsonl; a job trains it, in one start or several; each start
is noted in jobs/<job id>.jsonl. A run is quiet while none of its files changes.
"""

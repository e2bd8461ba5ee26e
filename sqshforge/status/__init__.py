"""The status of runs and jobs, read from the files of a run's folder, without a server.

Terms: a run is a folder with metrics.jsonl; a job trains it, in one or several starts; each start
is noted in jobs/<job id>.jsonl. A run is quiet while none of its files changes.
"""

"""Start a sqsh: with enroot if it is installed, else with own namespaces, mounts and pivot_root.

`run` gives a command the same conditions either way: the image's variables over the host's, its
working folder and entrypoint from /etc/rc, the host's devices, network and processes, and a
writable root that is discarded at the end. The calling process becomes the command, so that its
exit code and the signals that Slurm sends are the command's own.
"""

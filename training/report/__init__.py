"""Show runs side by side, as pictures and one page: `python -m training.report RUN ... -o DIR`."""

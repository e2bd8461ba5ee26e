"""A failed rank: restarted in place, requeued or given up, and what each of these costs."""

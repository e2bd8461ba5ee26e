"""What a build takes from outside, fetched once: verified, resumable, by way of the mirrors."""

"""What a build takes from outside, fetched once: verified, resumable, by way of the mirrors."""

from sqshforge.fetch.download import download
from sqshforge.fetch.files import File, files
from sqshforge.fetch.git import commit_of, snapshot

__all__ = ["File", "commit_of", "download", "files", "snapshot"]

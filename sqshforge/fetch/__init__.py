"""What a build takes from outside, fetched once: verified, resumable, by way of the mirrors."""

from sqshforge.fetch.download import download
from sqshforge.fetch.files import File, files
from sqshforge.fetch.git import snapshot

__all__ = ["File", "download", "files", "snapshot"]

"""Build an image from a recipe and its lock: Dockerfile, context, base image, downloads."""

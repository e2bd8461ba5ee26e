"""From a recipe and its lock to an image: Dockerfile, context, base image, what is fetched."""

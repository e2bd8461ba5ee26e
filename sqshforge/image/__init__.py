"""Sources of images, and how an image's layers become one tree with one configuration."""

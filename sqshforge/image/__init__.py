"""Where an image is read from, and how its layers become one tree with one configuration."""

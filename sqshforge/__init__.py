"""From recipe to running job: build, pack, run and test container images for pre-training.

Terms, used the same way everywhere:

recipe    one YAML file that says what goes into an image
target    a recipe's name, such as ``cpu-mamba``
lock      what a recipe resolves to: digests, versions, hashes
image     what the container engine builds
engine    docker or buildah
source    where an image is read from when it is packed
sqsh      the squash file made of an image
launcher  an sbatch script
"""

__version__ = "0.1.0"

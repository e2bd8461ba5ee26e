# Llama pre-training with SageMaker Model Parallel v2
#
# Rendered by `sqshforge render smp-llama` from images/smp-llama.Dockerfile.j2,
# recipes/smp-llama.yaml and its lock. Change those, not this file.
#
# Stages:
#
#   base ──> system ──┬──────────> image
#                     └─> code ─────┘
#
# base     the vendor's image, with its own Python, torch, libraries and EFA
# system   the base, if its Python is the recipe's
# code     launchers + training code, compiled
# image    the few packages that the base lacks + the result of stage code

ARG BASE=658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel:2.2.0-gpu-py310-cu121

FROM ${BASE} AS base

FROM base AS system
LABEL io.sqshforge.target=smp-llama
RUN command -v python3.10 || \
    { echo "the base has no python3.10: set the parameter python to what its tag says" >&2; exit 1; }

FROM system AS code
# Compiled here once, not by each process of a job. As with the packages, Python does not compare
# byte code with its source (unchecked-hash). The seed and the times are fixed, so that the same
# sources give the same bytes.
COPY payload/ /code/
RUN PYTHONHASHSEED=0 python3.10 -B -m compileall -q --invalidation-mode unchecked-hash \
        -s /code -p /sqshforge /code \
    && find /code \( -type d -o -name '*.pyc' \) -exec touch -d @1577836800 {} +

FROM system AS image
# Only packages in the lock are installed, from files whose checksums are in it. pip runs from its
# own wheel and stays out of the image.
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=pip --mount=type=secret,id=ca \
    { test "$(sha256sum </run/requirements/packages.txt)" = "4d38355ae2f80970b6413d6931628417d0f91921bf60bc6d07ca84e6cdcdcc5d  -" || { echo "wrong checksum: /run/requirements/packages.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/packages.txt
# Debian and Ubuntu have no `python`, which many command lines and scripts call.
RUN command -v python || ln -s "$(command -v python3.10)" /usr/local/bin/python
# The last two make the hooks of enroot and docker bring in the driver; not every base sets them.
ENV PYTHONPATH=/sqshforge \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTORCH_VERSION="2.2.0"
LABEL org.opencontainers.image.title="sqshforge smp-llama" \
    org.opencontainers.image.description="Llama pre-training with SageMaker Model Parallel v2" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.base.name="658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel:2.2.0-gpu-py310-cu121"
WORKDIR /sqshforge
# A vendor's entry point would print its banner before the output of each command.
ENTRYPOINT []
CMD ["/bin/bash"]
COPY meta/recipe.yaml meta/lock.json /sqshforge/meta/
ARG SOURCE_DATE_EPOCH=
RUN --mount=type=bind,source=inside,target=/run/inside \
    { test "$(sha256sum </run/inside/inventory.py)" = "2f459380b383c82d0d440e48695d9a107b7fbb348862386c313e0e91d0c90d1f  -" || { echo "wrong checksum: /run/inside/inventory.py" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/inside/sbom.py)" = "fe9e9280bbb9a7d809a306e2848cdc8fa4754810627a8270f5eb4fce75e83341  -" || { echo "wrong checksum: /run/inside/sbom.py" >&2; exit 1; }; } \
    && SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH}" python3.10 -B /run/inside/sbom.py --meta /sqshforge/meta
# Kernels that Triton compiled earlier, from warm/smp-llama/; usually none.
COPY triton-cache/ /sqshforge/triton-cache/
# Our own code comes last and in one step, because an edit rebuilds all later layers.
COPY --from=code /code/ /sqshforge/

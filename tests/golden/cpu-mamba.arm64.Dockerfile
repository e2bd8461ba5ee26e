# Mamba pre-training on CPU, for any Linux machine
#
# Rendered by `sqshforge render cpu-mamba --platform linux/arm64` from images/cpu-mamba.Dockerfile.j2,
# recipes/cpu-mamba.yaml and its lock. Change those, not this file.
#
# Stages:
#
#   base ──> system ──┬──────────> image
#                     └─> code ─────┘
#
# system   packages from apt
# code     launchers + training code, compiled
# image    locked Python packages + the result of stage code

ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base

FROM base AS system
LABEL io.sqshforge.target=cpu-mamba
ARG DEBIAN_FRONTEND=noninteractive
# Versions follow from the pinned suite (or snapshot) of the base, not from a pin per package.
# Without a network, both lists and packages come from apt/system.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/system ]; then cp -r /run/apt/system/. /var/; else apt-get update -qq; fi \
    && apt-get install -y -qq --no-install-recommends \
        libgomp1 \
        procps \
        python3 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*

FROM system AS code
# Compiled here once, not by each process of a job. As with the packages, Python does not compare
# byte code with its source (unchecked-hash). The seed and the times are fixed, so that the same
# sources give the same bytes.
COPY payload/ /code/
RUN PYTHONHASHSEED=0 python3.11 -B -m compileall -q --invalidation-mode unchecked-hash \
        -s /code -p /sqshforge /code \
    && find /code \( -type d -o -name '*.pyc' \) -exec touch -d @1577836800 {} +

FROM system AS image
# Only packages in the lock are installed, from files whose checksums are in it. pip runs from its
# own wheel and stays out of the image.
# The byte code is marked as never to be compared with its source: the image never changes, and
# starts faster. -B keeps this Python from first writing byte code of the other kind for what it
# imports. Packages' own tests, which no job imports, would be a third of the byte code. A few files
# of packages are for other versions of Python; those stay uncompiled (exit code 1).
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=pip --mount=type=secret,id=ca \
    { test "$(sha256sum </run/requirements/packages.txt)" = "a193ab4379c2d74549a5c92cd900e07ed4362d8d63968db9bf8d8754afc36be4  -" || { echo "wrong checksum: /run/requirements/packages.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.11 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/packages.txt \
    && { python3.11 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        /usr/local/lib/python3.11/dist-packages || [ "$?" -eq 1 ]; }
# Debian and Ubuntu have no `python`, which many command lines and scripts call.
RUN command -v python || ln -s "$(command -v python3.11)" /usr/local/bin/python
ENV PYTHONPATH=/sqshforge \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTORCH_VERSION="2.10.0"
LABEL org.opencontainers.image.title="sqshforge cpu-mamba" \
    org.opencontainers.image.description="Mamba pre-training on CPU, for any Linux machine" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.base.name="debian:bookworm-slim"
WORKDIR /sqshforge
# A vendor's entry point would print its banner before the output of each command.
ENTRYPOINT []
CMD ["/bin/bash"]
COPY meta/recipe.yaml meta/lock.json /sqshforge/meta/
ARG SOURCE_DATE_EPOCH=
RUN --mount=type=bind,source=inside,target=/run/inside \
    { test "$(sha256sum </run/inside/inventory.py)" = "2f459380b383c82d0d440e48695d9a107b7fbb348862386c313e0e91d0c90d1f  -" || { echo "wrong checksum: /run/inside/inventory.py" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/inside/sbom.py)" = "fe9e9280bbb9a7d809a306e2848cdc8fa4754810627a8270f5eb4fce75e83341  -" || { echo "wrong checksum: /run/inside/sbom.py" >&2; exit 1; }; } \
    && SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH}" python3.11 -B /run/inside/sbom.py --meta /sqshforge/meta
# Our own code comes last and in one step, because an edit rebuilds all later layers.
COPY --from=code /code/ /sqshforge/

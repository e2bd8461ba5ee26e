# Mamba-2 pre-training on AWS Trainium, Neuron SDK 2.21
#
# Rendered by `sqshforge render neuron-mamba2` from images/neuron-mamba2.Dockerfile.j2,
# recipes/neuron-mamba2.yaml and its lock. Change those, not this file.
#
# Stages:
#
#   base ──> system ──┬──────────> image
#                     └─> code ─────┘
#
# system   packages from apt, the EFA installer and the Neuron archive; the driver is the host's
# code     launchers + training code, compiled
# image    locked Python packages + torch and Neuron's packages, each from its index + the result of stage code

ARG BASE=ubuntu:22.04

FROM ${BASE} AS base

FROM base AS system
LABEL io.sqshforge.target=neuron-mamba2
ARG DEBIAN_FRONTEND=noninteractive
# Versions follow from the pinned suite (or snapshot) of the base, not from a pin per package.
# Without a network, both lists and packages come from apt/system.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/system ]; then cp -r /run/apt/system/. /var/; else apt-get update -qq; fi \
    && apt-get install -y -qq --no-install-recommends \
        ca-certificates \
        environment-modules \
        gcc \
        libc6-dev \
        libgomp1 \
        libnl-3-200 \
        libnl-3-dev \
        libnl-route-3-200 \
        libnl-route-3-dev \
        libxml2 \
        pciutils \
        perl \
        procps \
        python3 \
        python3-dev \
        tcl \
        udev \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*
# The --skip flags and --no-verify are for images, which have neither card nor kernel. The recipe
# lists the Debian packages that the installer's packages depend on; those that they only recommend
# are left out. So the installer needs nothing that a build without a network does not have.
ARG ARCHIVE_EFA
RUN --mount=type=bind,source=archives,target=/run/archives \
    --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    { test "$(sha256sum </run/archives/aws-efa-installer-1.30.0.tar.gz)" = "${ARCHIVE_EFA}  -" || { echo "wrong checksum: /run/archives/aws-efa-installer-1.30.0.tar.gz" >&2; exit 1; }; } \
    && if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/system ]; then cp -r /run/apt/system/. /var/; else apt-get update -qq; fi \
    && tar --extract --gzip --directory /tmp --file /run/archives/aws-efa-installer-1.30.0.tar.gz \
    && echo 'APT::Install-Recommends "false";' >/etc/apt/apt.conf.d/99efa-installer \
    && env --chdir /tmp/aws-efa-installer ./efa_installer.sh -y -g \
        --skip-kmod --no-verify --skip-limit-conf \
    && apt-get clean \
    && rm -rf /etc/apt/apt.conf.d/99efa-installer /tmp/aws-efa-installer /var/lib/apt/lists/* /var/log/* \
    && ldconfig
# The vendor's archive and its key; only packages signed with that key are installed from it.
ARG ARCHIVE_NEURON_KEY
RUN --mount=type=bind,source=archives,target=/run/archives \
    { test "$(sha256sum </run/archives/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB)" = "${ARCHIVE_NEURON_KEY}  -" || { echo "wrong checksum: /run/archives/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" >&2; exit 1; }; } \
    && install -D -m 644 /run/archives/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB /etc/apt/keyrings/neuron.asc \
    && echo "deb [signed-by=/etc/apt/keyrings/neuron.asc] https://apt.repos.neuron.amazonaws.com jammy main" \
        > /etc/apt/sources.list.d/neuron.list
# Versions follow from the pinned suite (or snapshot) of the base, not from a pin per package.
# Without a network, both lists and packages come from apt/neuron.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/neuron ]; then cp -r /run/apt/neuron/. /var/; else apt-get update -qq; fi \
    && apt-get install -y -qq --no-install-recommends \
        aws-neuronx-collectives=2.23.135.0-3e70920f2 \
        aws-neuronx-runtime-lib=2.23.112.0-9b5179492 \
        aws-neuronx-tools=2.20.204.0 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*

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
# The byte code is marked as never to be compared with its source: the image never changes, and
# starts faster. -B keeps this Python from first writing byte code of the other kind for what it
# imports. Packages' own tests, which no job imports, would be a third of the byte code. A few files
# of packages are for other versions of Python; those stay uncompiled (exit code 1).
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=pip --mount=type=secret,id=ca \
    { test "$(sha256sum </run/requirements/packages.txt)" = "27dc2b7842241b4396aac5a7c28cc01ce5c8911f20ba1a7d8a1f232184edd1a5  -" || { echo "wrong checksum: /run/requirements/packages.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/packages.txt \
    && { python3.10 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        /usr/local/lib/python3.10/dist-packages || [ "$?" -eq 1 ]; }
# Neither the environment (--isolated) nor the base's configuration file (PIP_CONFIG_FILE) may add
# another index. A mirror's address may contain a password, so it comes as a secret.
# Only new files are compiled to byte code: the others are compiled already.
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=ca --mount=type=secret,id=index-pytorch \
    { test "$(sha256sum </run/requirements/pytorch.txt)" = "38fed51fe0b912a39175f289756e16e088111e9aa28e472d1ea5771ace964be5  -" || { echo "wrong checksum: /run/requirements/pytorch.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/ca ]; then export REQUESTS_CA_BUNDLE=/run/secrets/ca; fi \
    && touch /tmp/before \
    && PIP_CONFIG_FILE=/dev/null \
        python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip --isolated install \
        --no-cache-dir --no-compile \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --index-url "$(cat /run/secrets/index-pytorch || echo https://download.pytorch.org/whl/cpu)" --find-links /run/wheels \
        --requirement /run/requirements/pytorch.txt \
    && find /usr/local/lib/python3.10/dist-packages -name '*.py' -cnewer /tmp/before -fprint /tmp/added \
    && { python3.10 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        -i /tmp/added || [ "$?" -eq 1 ]; } \
    && rm /tmp/before /tmp/added
# Neither the environment (--isolated) nor the base's configuration file (PIP_CONFIG_FILE) may add
# another index. A mirror's address may contain a password, so it comes as a secret.
# Only new files are compiled to byte code: the others are compiled already.
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=ca --mount=type=secret,id=index-neuron \
    { test "$(sha256sum </run/requirements/neuron.txt)" = "68f2a5ed4a1091e052e50c982e0b30e5d587268339c1991c1c00a92c115a2ec8  -" || { echo "wrong checksum: /run/requirements/neuron.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/ca ]; then export REQUESTS_CA_BUNDLE=/run/secrets/ca; fi \
    && touch /tmp/before \
    && PIP_CONFIG_FILE=/dev/null \
        python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip --isolated install \
        --no-cache-dir --no-compile \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --index-url "$(cat /run/secrets/index-neuron || echo https://pip.repos.neuron.amazonaws.com)" --find-links /run/wheels \
        --requirement /run/requirements/neuron.txt \
    && find /usr/local/lib/python3.10/dist-packages -name '*.py' -cnewer /tmp/before -fprint /tmp/added \
    && { python3.10 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        -i /tmp/added || [ "$?" -eq 1 ]; } \
    && rm /tmp/before /tmp/added
ENV PATH=/opt/aws/neuron/bin:/opt/amazon/openmpi/bin:/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/opt/aws/neuron/lib:/opt/amazon/openmpi/lib:/opt/amazon/efa/lib
# Debian and Ubuntu have no `python`, which many command lines and scripts call.
RUN command -v python || ln -s "$(command -v python3.10)" /usr/local/bin/python
ENV PYTHONPATH=/sqshforge \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTORCH_VERSION="2.5.1"
LABEL org.opencontainers.image.title="sqshforge neuron-mamba2" \
    org.opencontainers.image.description="Mamba-2 pre-training on AWS Trainium, Neuron SDK 2.21" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.base.name="ubuntu:22.04"
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
# Our own code comes last and in one step, because an edit rebuilds all later layers.
COPY --from=code /code/ /sqshforge/

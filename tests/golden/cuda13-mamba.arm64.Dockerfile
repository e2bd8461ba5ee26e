# Mamba and Mamba-2 pre-training on CUDA 13, for Hopper and Blackwell
#
# Rendered by `sqshforge render cuda13-mamba --platform linux/arm64` from images/cuda13-mamba.Dockerfile.j2,
# recipes/cuda13-mamba.yaml and its lock. Change those, not this file.
#
# Stages:
#
#   base ──> system ──┬─> packages ────────────────> image
#                     │      ┊ mounted                 ↑ wheels, library, licenses
#                     └─> compiler ─┬                  │
#                                   ├─> causal-conv1d ─┤
#                                   ├─> mamba-ssm ─────┤
#                                   └─> gdrcopy ───────┤
#             system ──> licenses ─────────────────────┤
#             system ──> code ─────────────────────────┘
#
# system    packages from apt and the EFA installer
# packages  locked Python packages, including CUDA's libraries and NCCL
# compiler  CUDA's compiler from its Python packages; only copied files get into the image
# code      launchers + training code, compiled
# image     the results of the other stages

ARG BASE=debian:bookworm-slim

FROM ${BASE} AS base

FROM base AS system
LABEL io.sqshforge.target=cuda13-mamba
ARG DEBIAN_FRONTEND=noninteractive
# Versions follow from the pinned suite (or snapshot) of the base, not from a pin per package.
# Without a network, both lists and packages come from apt/system.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/system ]; then cp -r /run/apt/system/. /var/; else apt-get update -qq; fi \
    && apt-get install -y -qq --no-install-recommends \
        environment-modules \
        gcc \
        libc6-dev \
        libgomp1 \
        libhwloc15 \
        libnl-3-200 \
        libnl-3-dev \
        libnl-route-3-200 \
        libnl-route-3-dev \
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
    { test "$(sha256sum </run/archives/aws-efa-installer-1.48.0.tar.gz)" = "${ARCHIVE_EFA}  -" || { echo "wrong checksum: /run/archives/aws-efa-installer-1.48.0.tar.gz" >&2; exit 1; }; } \
    && if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/system ]; then cp -r /run/apt/system/. /var/; else apt-get update -qq; fi \
    && tar --extract --gzip --directory /tmp --file /run/archives/aws-efa-installer-1.48.0.tar.gz \
    && echo 'APT::Install-Recommends "false";' >/etc/apt/apt.conf.d/99efa-installer \
    && env --chdir /tmp/aws-efa-installer ./efa_installer.sh -y -g \
        --skip-kmod --no-verify --skip-limit-conf \
    && apt-get clean \
    && rm -rf /etc/apt/apt.conf.d/99efa-installer /tmp/aws-efa-installer /var/lib/apt/lists/* /var/log/* \
    && ldconfig

FROM system AS packages
# Only packages in the lock are installed, from files whose checksums are in it. pip runs from its
# own wheel and stays out of the image.
# The byte code is marked as never to be compared with its source: the image never changes, and
# starts faster. -B keeps this Python from first writing byte code of the other kind for what it
# imports. Packages' own tests, which no job imports, would be a third of the byte code. A few files
# of packages are for other versions of Python; those stay uncompiled (exit code 1).
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=pip --mount=type=secret,id=ca \
    { test "$(sha256sum </run/requirements/packages.txt)" = "38f955ee5b9abd7b7507fe4f6ffbbc4ceac8e58d3d2f8c489c02fee8ca14cdc1  -" || { echo "wrong checksum: /run/requirements/packages.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.11 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/packages.txt \
    && { python3.11 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        /usr/local/lib/python3.11/dist-packages || [ "$?" -eq 1 ]; }

FROM system AS compiler
ARG DEBIAN_FRONTEND=noninteractive
# Versions follow from the pinned suite (or snapshot) of the base, not from a pin per package.
# Without a network, both lists and packages come from apt/compiler.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/compiler ]; then cp -r /run/apt/compiler/. /var/; else apt-get update -qq; fi \
    && apt-get install -y -qq --no-install-recommends \
        g++ \
        make \
        patch \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=pip --mount=type=secret,id=ca \
    { test "$(sha256sum </run/requirements/builders.txt)" = "9eaa2fd567146d9ef55d82c61babc64bd8b74e3335b4a3bbdb2153b12a348440  -" || { echo "wrong checksum: /run/requirements/builders.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.11 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --target /opt/builders \
        --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/builders.txt
ENV PATH=/opt/builders/bin:$PATH \
    PYTHONPATH=/opt/builders
# The packages lack the names that linkers look for; headers of CUDA's libraries come with torch's.
RUN ln -s lib /opt/builders/nvidia/cu13/lib64 \
    && ln -s libcudart.so.13 /opt/builders/nvidia/cu13/lib/libcudart.so
ENV CUDA_HOME=/opt/builders/nvidia/cu13 \
    CPATH=/usr/local/lib/python3.11/dist-packages/nvidia/cu13/include

FROM compiler AS causal-conv1d
ARG MAX_JOBS=2
# /build is kept between builds, so an interrupted one resumes. The package is compiled against the
# image's own packages, which are only mounted.
RUN --mount=type=bind,source=sdists,target=/run/source \
    --mount=type=bind,source=patches,target=/run/patches \
    --mount=type=bind,from=packages,source=/usr/local/lib/python3.11/dist-packages,target=/usr/local/lib/python3.11/dist-packages \
    --mount=type=cache,id=causal-conv1d.arm64-03aaf7f6f7a0,target=/build \
    { test "$(sha256sum </run/source/causal-conv1d.tar.gz)" = "3202758494eaa7b597ce1c282dfa188889506bfcb92cad3c407d26736bfcd32b  -" || { echo "wrong checksum: /run/source/causal-conv1d.tar.gz" >&2; exit 1; }; } \
    && tar --extract --strip-components 1 --directory /build \
        --file /run/source/causal-conv1d.tar.gz \
    && { test "$(sha256sum </run/patches/causal-conv1d-1.7.0/architectures.patch)" = "2c86225f76c569d8d167b42b19880ba9f944a89e0cef108f1569920a7c99234b  -" || { echo "wrong checksum: /run/patches/causal-conv1d-1.7.0/architectures.patch" >&2; exit 1; }; } \
    && patch --directory /build --strip 1 --forward --input /run/patches/causal-conv1d-1.7.0/architectures.patch \
    && { test "$(sha256sum </build/setup.py)" = "48e59c8920709c2f1ed769d32582df783de72a13ca6443e47c987acb1b7eb84c  -" || { echo "wrong checksum: /build/setup.py" >&2; exit 1; }; } \
    && export CUDA_ARCHITECTURES="90 100 103 120+PTX" MAX_JOBS="${MAX_JOBS}" \
        CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
    && for name in http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY; do \
        export "$name=http://127.0.0.1:9"; done \
    && unset no_proxy NO_PROXY && export GIT_ALLOW_PROTOCOL=file PIP_NO_INDEX=1 \
    && mkdir /wheels \
    && env --chdir /build python3.11 setup.py bdist_wheel --dist-dir /wheels

FROM compiler AS mamba-ssm
ARG MAX_JOBS=2
# /build is kept between builds, so an interrupted one resumes. The package is compiled against the
# image's own packages, which are only mounted.
RUN --mount=type=bind,source=sdists,target=/run/source \
    --mount=type=bind,source=patches,target=/run/patches \
    --mount=type=bind,from=packages,source=/usr/local/lib/python3.11/dist-packages,target=/usr/local/lib/python3.11/dist-packages \
    --mount=type=cache,id=mamba-ssm.arm64-542390a77927,target=/build \
    { test "$(sha256sum </run/source/mamba-ssm.tar.gz)" = "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028  -" || { echo "wrong checksum: /run/source/mamba-ssm.tar.gz" >&2; exit 1; }; } \
    && tar --extract --strip-components 1 --directory /build \
        --file /run/source/mamba-ssm.tar.gz \
    && { test "$(sha256sum </run/patches/mamba-ssm-2.3.2.post1/architectures.patch)" = "b326490eac03eacef22991c73e80163f45c99c42778fa4db61a0943b584388a6  -" || { echo "wrong checksum: /run/patches/mamba-ssm-2.3.2.post1/architectures.patch" >&2; exit 1; }; } \
    && patch --directory /build --strip 1 --forward --input /run/patches/mamba-ssm-2.3.2.post1/architectures.patch \
    && { test "$(sha256sum </build/setup.py)" = "957b0614c3c80ade4aae50bf620e7de07772f885753700c1cab6aa9a5ccd5332  -" || { echo "wrong checksum: /build/setup.py" >&2; exit 1; }; } \
    && export CUDA_ARCHITECTURES="90 100 103 120+PTX" MAX_JOBS="${MAX_JOBS}" \
        CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
    && for name in http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY; do \
        export "$name=http://127.0.0.1:9"; done \
    && unset no_proxy NO_PROXY && export GIT_ALLOW_PROTOCOL=file PIP_NO_INDEX=1 \
    && mkdir /wheels \
    && env --chdir /build python3.11 setup.py bdist_wheel --dist-dir /wheels

FROM compiler AS gdrcopy
ARG SOURCE_GDRCOPY
RUN --mount=type=bind,source=sources,target=/run/sources \
    { test "$(sha256sum </run/sources/gdrcopy.tar)" = "${SOURCE_GDRCOPY}  -" || { echo "wrong checksum: /run/sources/gdrcopy.tar" >&2; exit 1; }; } \
    && mkdir /tmp/gdrcopy \
    && tar --extract --directory /tmp/gdrcopy --file /run/sources/gdrcopy.tar \
    && for name in http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY; do \
        export "$name=http://127.0.0.1:9"; done \
    && unset no_proxy NO_PROXY && export GIT_ALLOW_PROTOCOL=file PIP_NO_INDEX=1 \
    && make --directory /tmp/gdrcopy lib_install prefix=/opt/gdrcopy \
    && rm -rf /tmp/gdrcopy

FROM system AS licenses
ARG SOURCE_GDRCOPY
RUN --mount=type=bind,source=sources,target=/run/sources \
    --mount=type=bind,source=inside,target=/run/inside \
    { test "$(sha256sum </run/inside/licenses.py)" = "d63e6065fa0ac995847affc67447d37b1f8eb7a2b0fd0d538645ef6ebb01a8dc  -" || { echo "wrong checksum: /run/inside/licenses.py" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/sources/gdrcopy.tar)" = "${SOURCE_GDRCOPY}  -" || { echo "wrong checksum: /run/sources/gdrcopy.tar" >&2; exit 1; }; } \
    && python3.11 -B /run/inside/licenses.py --into /licenses \
        /run/sources/gdrcopy.tar


FROM system AS code
# Compiled here once, not by each process of a job. As with the packages, Python does not compare
# byte code with its source (unchecked-hash). The seed and the times are fixed, so that the same
# sources give the same bytes.
COPY payload/ /code/
RUN PYTHONHASHSEED=0 python3.11 -B -m compileall -q --invalidation-mode unchecked-hash \
        -s /code -p /sqshforge /code \
    && find /code \( -type d -o -name '*.pyc' \) -exec touch -d @1577836800 {} +

FROM packages AS image
# Only new files are compiled to byte code: the others are compiled already.
RUN --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=bind,from=causal-conv1d,source=/wheels,target=/run/built/causal-conv1d \
    --mount=type=bind,from=mamba-ssm,source=/wheels,target=/run/built/mamba-ssm \
    touch /tmp/before \
    && python3.11 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --no-index --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        /run/built/*/*.whl \
    && find /usr/local/lib/python3.11/dist-packages -name '*.py' -cnewer /tmp/before -fprint /tmp/added \
    && { python3.11 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        -i /tmp/added || [ "$?" -eq 1 ]; } \
    && rm /tmp/before /tmp/added
COPY --from=gdrcopy /opt/gdrcopy/lib/ /opt/gdrcopy/lib/
RUN echo /opt/gdrcopy/lib >/etc/ld.so.conf.d/gdrcopy.conf \
    && ldconfig \
    && rm -f /var/cache/ldconfig/aux-cache \
    && python3.11 -B -c 'import ctypes; ctypes.CDLL("libgdrapi.so")'
# The installer's plugin loads CUDA's runtime by a name that its Python package lacks; with this link
# it loads torch's copy. Without runtime or plugin, NCCL would use TCP and say so only in its debug
# log.
RUN ln -s /usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libcudart.so.13 /usr/local/lib/libcudart.so \
    && ldconfig \
    && rm -f /var/cache/ldconfig/aux-cache \
    && python3.11 -B -c 'import ctypes; ctypes.CDLL("libcudart.so")' \
    && { test -e /opt/amazon/ofi-nccl/lib/libnccl-net.so || { echo "the EFA installer has brought no plugin for NCCL" >&2; exit 1; }; }
ENV PATH=/opt/amazon/openmpi/bin:/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/openmpi/lib:/opt/amazon/efa/lib
# Beside those of Debian packages, which include the EFA installer's.
COPY --from=licenses /licenses/ /usr/share/doc/
# Debian and Ubuntu have no `python`, which many command lines and scripts call.
RUN command -v python || ln -s "$(command -v python3.11)" /usr/local/bin/python
# The last two make the hooks of enroot and docker bring in the driver; not every base sets them.
ENV PYTHONPATH=/sqshforge \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTORCH_VERSION="2.13.0"
LABEL org.opencontainers.image.title="sqshforge cuda13-mamba" \
    org.opencontainers.image.description="Mamba and Mamba-2 pre-training on CUDA 13, for Hopper and Blackwell" \
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
# Kernels that Triton compiled earlier, from warm/cuda13-mamba.arm64/; usually none.
COPY triton-cache/ /sqshforge/triton-cache/
# Our own code comes last and in one step, because an edit rebuilds all later layers.
COPY --from=code /code/ /sqshforge/

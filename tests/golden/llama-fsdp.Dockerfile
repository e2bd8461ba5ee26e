# Llama, Mixtral and Mistral pre-training with FSDP on CUDA 12.1, for EFA clusters
#
# Rendered by `sqshforge render llama-fsdp` from images/cuda.Dockerfile.j2,
# recipes/llama-fsdp.yaml and its lock. Change those, not this file.
#
# Stages:
#
#   base ──> system ──> packages ───────────────> image
#                          ┊ mounted                ↑ wheels, libraries, licenses
#   compiled-on ──> compiler ──┬─> triton ──────────┤
#                              ├─> nccl ────────────┤
#                              └─> aws-ofi-nccl ────┤  links against system's libfabric
#   system ──> licenses ────────────────────────────┤
#   system ──> code ────────────────────────────────┘
#
# system    packages from apt and the EFA installer
# packages  locked Python packages
# compiler  the base's twin with CUDA's compiler; only copied files get into the image
# code      launchers + training code, compiled
# image     the results of the other stages

ARG BASE=nvidia/cuda:12.1.1-base-ubuntu22.04
ARG COMPILER=nvidia/cuda:12.1.1-devel-ubuntu22.04

FROM ${BASE} AS base
FROM ${COMPILER} AS compiled-on

FROM base AS system
LABEL io.sqshforge.target=llama-fsdp
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
    { test "$(sha256sum </run/requirements/packages.txt)" = "cb16afd34d952dd179b0796d20e23b9047917833505eb40324be5c4be6b950c5  -" || { echo "wrong checksum: /run/requirements/packages.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/packages.txt \
    && { python3.10 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        /usr/local/lib/python3.10/dist-packages || [ "$?" -eq 1 ]; }

FROM compiled-on AS compiler
LABEL io.sqshforge.target=llama-fsdp
ARG DEBIAN_FRONTEND=noninteractive
# Versions follow from the pinned suite (or snapshot) of the base, not from a pin per package.
# Without a network, both lists and packages come from apt/compiler.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt --mount=type=secret,id=ca \
    --mount=type=bind,source=apt,target=/run/apt \
    if [ -s /run/secrets/apt ]; then export APT_CONFIG=/run/secrets/apt; fi \
    && if [ -d /run/apt/compiler ]; then cp -r /run/apt/compiler/. /var/; else apt-get update -qq; fi \
    && apt-get install -y -qq --no-install-recommends \
        autoconf \
        automake \
        ca-certificates \
        cmake \
        g++ \
        git \
        libhwloc-dev \
        libtool \
        make \
        patch \
        python3 \
        python3-dev \
        xz-utils \
        zlib1g-dev \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache /var/log/*
RUN --mount=type=bind,source=requirements,target=/run/requirements \
    --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=secret,id=pip --mount=type=secret,id=ca \
    { test "$(sha256sum </run/requirements/builders.txt)" = "7c5c086af1e37275c8403c0e3228e087f6a246f8341318dd911f4962706c73e6  -" || { echo "wrong checksum: /run/requirements/builders.txt" >&2; exit 1; }; } \
    && if [ -s /run/secrets/pip ]; then export PIP_CONFIG_FILE=/run/secrets/pip; fi \
    && if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi \
    && python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --require-hashes --target /opt/builders \
        --root-user-action=ignore --disable-pip-version-check \
        --find-links /run/wheels --requirement /run/requirements/builders.txt
ENV PATH=/opt/builders/bin:$PATH \
    PYTHONPATH=/opt/builders

FROM compiler AS triton
ARG MAX_JOBS=2
ARG SOURCE_GOOGLETEST
ARG SOURCE_TRITON
ARG ARCHIVE_CUOBJDUMP
ARG ARCHIVE_LLVM
ARG ARCHIVE_NVDISASM
ARG ARCHIVE_PTXAS
# If setup.py does not find LLVM, pybind11 and NVIDIA's programs, it downloads them, and
# CMakeLists.txt clones googletest. All are put where they are looked for, and the network is off.
# The patches are applied before anything is compiled, so no unpatched copy can be installed.
# In this version setup.py passes no flags to cmake, so printf writes a wrapper that adds them; its
# variables are for the wrapper to expand.
# hadolint ignore=SC2016
RUN --mount=type=bind,source=sources,target=/run/sources \
    --mount=type=bind,source=archives,target=/run/archives \
    --mount=type=bind,source=patches,target=/run/patches \
    --mount=type=cache,id=triton-300a69dd1c50,target=/build \
    mkdir -p /wheels /tmp/cmake /tmp/cuda /tmp/googletest /tmp/llvm /build/python/triton/third_party/cuda/bin \
    && { test "$(sha256sum </run/sources/triton.tar)" = "${SOURCE_TRITON}  -" || { echo "wrong checksum: /run/sources/triton.tar" >&2; exit 1; }; } \
    && tar --extract --directory /build --file /run/sources/triton.tar \
    && { test "$(sha256sum </run/sources/googletest.tar)" = "${SOURCE_GOOGLETEST}  -" || { echo "wrong checksum: /run/sources/googletest.tar" >&2; exit 1; }; } \
    && tar --extract --directory /tmp/googletest --file /run/sources/googletest.tar \
    && { test "$(sha256sum </run/archives/llvm-5e5a22ca-ubuntu-x64.tar.gz)" = "${ARCHIVE_LLVM}  -" || { echo "wrong checksum: /run/archives/llvm-5e5a22ca-ubuntu-x64.tar.gz" >&2; exit 1; }; } \
    && tar --extract --gzip --strip-components 1 --directory /tmp/llvm \
        --file /run/archives/llvm-5e5a22ca-ubuntu-x64.tar.gz \
    && { test "$(sha256sum </run/archives/cuda_cuobjdump-linux-x86_64-12.3.52-archive.tar.xz)" = "${ARCHIVE_CUOBJDUMP}  -" || { echo "wrong checksum: /run/archives/cuda_cuobjdump-linux-x86_64-12.3.52-archive.tar.xz" >&2; exit 1; }; } \
    && tar --extract --xz --strip-components 1 --directory /tmp/cuda \
        --file /run/archives/cuda_cuobjdump-linux-x86_64-12.3.52-archive.tar.xz \
    && cp /tmp/cuda/bin/cuobjdump /build/python/triton/third_party/cuda/bin/ \
    && { test "$(sha256sum </run/archives/cuda_nvdisasm-linux-x86_64-12.3.52-archive.tar.xz)" = "${ARCHIVE_NVDISASM}  -" || { echo "wrong checksum: /run/archives/cuda_nvdisasm-linux-x86_64-12.3.52-archive.tar.xz" >&2; exit 1; }; } \
    && tar --extract --xz --strip-components 1 --directory /tmp/cuda \
        --file /run/archives/cuda_nvdisasm-linux-x86_64-12.3.52-archive.tar.xz \
    && cp /tmp/cuda/bin/nvdisasm /build/python/triton/third_party/cuda/bin/ \
    && { test "$(sha256sum </run/archives/cuda_nvcc-linux-x86_64-12.3.52-archive.tar.xz)" = "${ARCHIVE_PTXAS}  -" || { echo "wrong checksum: /run/archives/cuda_nvcc-linux-x86_64-12.3.52-archive.tar.xz" >&2; exit 1; }; } \
    && tar --extract --xz --strip-components 1 --directory /tmp/cuda \
        --file /run/archives/cuda_nvcc-linux-x86_64-12.3.52-archive.tar.xz \
    && cp /tmp/cuda/bin/ptxas /build/python/triton/third_party/cuda/bin/ \
    && { test "$(sha256sum </run/patches/triton-2.2.0/cache-private.patch)" = "0c4873de4babea122e40834e15768d606b8bdecc566c36a923251e41fbbf8e6c  -" || { echo "wrong checksum: /run/patches/triton-2.2.0/cache-private.patch" >&2; exit 1; }; } \
    && patch --directory /build --strip 1 --forward --input /run/patches/triton-2.2.0/cache-private.patch \
    && { test "$(sha256sum </build/python/triton/runtime/cache.py)" = "e7de539507bfe7c95ffcb995761fd2a64de2de0c1b4b9edbee7d4aa8c69e337b  -" || { echo "wrong checksum: /build/python/triton/runtime/cache.py" >&2; exit 1; }; } \
    && printf '%s\n' '#!/bin/sh' \
        'case "$1" in -*) exec /usr/bin/cmake "$@" ;; esac' \
        'exec /usr/bin/cmake -DGOOGLETEST_DIR=/tmp/googletest -DFETCHCONTENT_FULLY_DISCONNECTED=ON "$@"' \
        >/tmp/cmake/cmake \
    && chmod +x /tmp/cmake/cmake \
    && for name in http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY; do \
        export "$name=http://127.0.0.1:9"; done \
    && unset no_proxy NO_PROXY && export GIT_ALLOW_PROTOCOL=file PIP_NO_INDEX=1 \
    && PATH="/tmp/cmake:$PATH" LLVM_SYSPATH=/tmp/llvm PYBIND11_SYSPATH=/opt/builders/pybind11 \
        HOME=/build/home MAX_JOBS="${MAX_JOBS}" env --chdir /build/python \
        python3.10 setup.py bdist_wheel --dist-dir /wheels \
    && rm -rf /tmp/cmake /tmp/cuda /tmp/googletest /tmp/llvm


FROM compiler AS nccl
ARG MAX_JOBS=2
ARG SOURCE_NCCL
RUN --mount=type=bind,source=sources,target=/run/sources \
    --mount=type=cache,id=nccl-80-86-90,target=/build \
    { test "$(sha256sum </run/sources/nccl.tar)" = "${SOURCE_NCCL}  -" || { echo "wrong checksum: /run/sources/nccl.tar" >&2; exit 1; }; } \
    && mkdir -p "/build/${SOURCE_NCCL}" \
    && tar --extract --directory "/build/${SOURCE_NCCL}" --file /run/sources/nccl.tar \
    && for name in http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY; do \
        export "$name=http://127.0.0.1:9"; done \
    && unset no_proxy NO_PROXY && export GIT_ALLOW_PROTOCOL=file PIP_NO_INDEX=1 \
    && make --directory "/build/${SOURCE_NCCL}" --jobs "${MAX_JOBS}" src.build \
        NVCC_GENCODE="-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_86,code=sm_86 -gencode=arch=compute_90,code=sm_90" \
    && make --directory "/build/${SOURCE_NCCL}" install PREFIX=/opt/nccl \
    && rm -f /opt/nccl/lib/*.a

FROM compiler AS aws-ofi-nccl
ARG MAX_JOBS=2
ARG SOURCE_AWS_OFI_NCCL
# libfabric is the one that the EFA installer brought to the image. It is only linked against here;
# its own dependencies are not in this stage.
RUN --mount=type=bind,source=sources,target=/run/sources \
    --mount=type=bind,from=system,source=/opt/amazon,target=/opt/amazon \
    { test "$(sha256sum </run/sources/aws-ofi-nccl.tar)" = "${SOURCE_AWS_OFI_NCCL}  -" || { echo "wrong checksum: /run/sources/aws-ofi-nccl.tar" >&2; exit 1; }; } \
    && mkdir /tmp/plugin \
    && tar --extract --directory /tmp/plugin --file /run/sources/aws-ofi-nccl.tar \
    && for name in http_proxy https_proxy ftp_proxy all_proxy HTTP_PROXY HTTPS_PROXY FTP_PROXY ALL_PROXY; do \
        export "$name=http://127.0.0.1:9"; done \
    && unset no_proxy NO_PROXY && export GIT_ALLOW_PROTOCOL=file PIP_NO_INDEX=1 \
    && env --chdir /tmp/plugin ./autogen.sh \
    && env --chdir /tmp/plugin LDFLAGS=-Wl,--allow-shlib-undefined ./configure --prefix=/opt/aws-ofi-nccl --enable-platform-aws \
        --disable-tests --with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda \
    && make --directory /tmp/plugin --jobs "${MAX_JOBS}" install \
    && rm -rf /tmp/plugin

FROM system AS licenses
ARG SOURCE_AWS_OFI_NCCL
ARG SOURCE_GOOGLETEST
ARG SOURCE_NCCL
ARG SOURCE_TRITON
RUN --mount=type=bind,source=sources,target=/run/sources \
    --mount=type=bind,source=inside,target=/run/inside \
    { test "$(sha256sum </run/inside/licenses.py)" = "d63e6065fa0ac995847affc67447d37b1f8eb7a2b0fd0d538645ef6ebb01a8dc  -" || { echo "wrong checksum: /run/inside/licenses.py" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/sources/aws-ofi-nccl.tar)" = "${SOURCE_AWS_OFI_NCCL}  -" || { echo "wrong checksum: /run/sources/aws-ofi-nccl.tar" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/sources/googletest.tar)" = "${SOURCE_GOOGLETEST}  -" || { echo "wrong checksum: /run/sources/googletest.tar" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/sources/nccl.tar)" = "${SOURCE_NCCL}  -" || { echo "wrong checksum: /run/sources/nccl.tar" >&2; exit 1; }; } \
    && { test "$(sha256sum </run/sources/triton.tar)" = "${SOURCE_TRITON}  -" || { echo "wrong checksum: /run/sources/triton.tar" >&2; exit 1; }; } \
    && python3.10 -B /run/inside/licenses.py --into /licenses \
        /run/sources/aws-ofi-nccl.tar \
        /run/sources/googletest.tar \
        /run/sources/nccl.tar \
        /run/sources/triton.tar


FROM system AS code
# Compiled here once, not by each process of a job. As with the packages, Python does not compare
# byte code with its source (unchecked-hash). The seed and the times are fixed, so that the same
# sources give the same bytes.
COPY payload/ /code/
RUN PYTHONHASHSEED=0 python3.10 -B -m compileall -q --invalidation-mode unchecked-hash \
        -s /code -p /sqshforge /code \
    && find /code \( -type d -o -name '*.pyc' \) -exec touch -d @1577836800 {} +

FROM packages AS image
# Only new files are compiled to byte code: the others are compiled already.
RUN --mount=type=bind,source=wheels,target=/run/wheels \
    --mount=type=bind,from=triton,source=/wheels,target=/run/built/triton \
    touch /tmp/before \
    && python3.10 /run/wheels/pip-25.3-py3-none-any.whl/pip install \
        --no-cache-dir --no-compile --no-deps --no-index --ignore-installed \
        --break-system-packages --root-user-action=ignore --disable-pip-version-check \
        /run/built/*/*.whl \
    && find /usr/local/lib/python3.10/dist-packages -name '*.py' -cnewer /tmp/before -fprint /tmp/added \
    && { python3.10 -B -m compileall -qq -j 0 -x /tests/ --invalidation-mode unchecked-hash \
        -i /tmp/added || [ "$?" -eq 1 ]; } \
    && rm /tmp/before /tmp/added
COPY --from=nccl /opt/nccl/lib/ /opt/nccl/lib/
# torch brings its own NCCL; this one is loaded instead.
ENV LD_PRELOAD=/opt/nccl/lib/libnccl.so.2
# Includes share/, where the plugin has NCCL find the topology of an instance.
COPY --from=aws-ofi-nccl /opt/aws-ofi-nccl/ /opt/aws-ofi-nccl/
ENV PATH=/opt/amazon/openmpi/bin:/opt/amazon/efa/bin:$PATH \
    LD_LIBRARY_PATH=/opt/aws-ofi-nccl/lib:/opt/amazon/openmpi/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH
# Beside those of Debian packages, which include the EFA installer's.
COPY --from=licenses /licenses/ /usr/share/doc/
# Debian and Ubuntu have no `python`, which many command lines and scripts call.
RUN command -v python || ln -s "$(command -v python3.10)" /usr/local/bin/python
# The last two make the hooks of enroot and docker bring in the driver; not every base sets them.
ENV PYTHONPATH=/sqshforge \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMPI_MCA_btl="tcp,self" \
    OMPI_MCA_btl_tcp_if_exclude="lo,docker0" \
    OMPI_MCA_pml="^cm,ucx" \
    OPAL_PREFIX="/opt/amazon/openmpi" \
    PMIX_MCA_gds="hash" \
    PYTORCH_VERSION="2.2.2"
LABEL org.opencontainers.image.title="sqshforge llama-fsdp" \
    org.opencontainers.image.description="Llama, Mixtral and Mistral pre-training with FSDP on CUDA 12.1, for EFA clusters" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.base.name="nvidia/cuda:12.1.1-base-ubuntu22.04"
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
# Kernels that Triton compiled earlier, from warm/llama-fsdp/; usually none.
COPY triton-cache/ /sqshforge/triton-cache/
# Our own code comes last and in one step, because an edit rebuilds all later layers.
COPY --from=code /code/ /sqshforge/

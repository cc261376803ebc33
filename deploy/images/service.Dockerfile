# The service: coordinator, workers and Ray's nodes all run from this image.
#
#   docker build -f deploy/images/service.Dockerfile -t registry.example.com/dataservice:0.1.0 .
#
# To run with a read-only root filesystem it needs /tmp to be writable, and nothing else.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# ---- build: everything goes into one virtual environment ----------------------------------------
FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all:
WORKDIR /build

# Dependencies first: they change less often than the code.
COPY pyproject.toml constraints.txt ./
COPY deploy/images/requirements.py ./
# torch is the trainer's, and by far the largest; the service does not import it.
RUN python -m venv /opt/dataservice \
 && python requirements.py service s3 traces --without torch > requirements.txt \
 && /opt/dataservice/bin/pip install -c constraints.txt -r requirements.txt setuptools

COPY README.md LICENSE ./
COPY protos ./protos
COPY trainer_client ./trainer_client
COPY dataservice ./dataservice
RUN /opt/dataservice/bin/pip install --no-deps --no-build-isolation .

# Kernels are compiled for a processor that every machine of the last ten years is at least, and
# not for the one that builds the image: the cache would be void on any other, and a coordinator
# that moves between machines plans by the same machine code. On arm64 build with
# --build-arg CPU_NAME=generic.
ARG CPU_NAME=x86-64-v3
ENV NUMBA_CPU_NAME=${CPU_NAME} NUMBA_CPU_FEATURES="" NUMBA_CACHE_DIR=/opt/kernels
RUN /opt/dataservice/bin/python -m dataservice.warm

# ---- run ----------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CPU_NAME=x86-64-v3
LABEL org.opencontainers.image.title="dataservice" \
      org.opencontainers.image.description="Balanced data loading for multimodal LLM training: the service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

COPY --from=build /opt/dataservice /opt/dataservice
COPY --from=build /opt/kernels /opt/kernels

# Numba writes where it keeps kernels. The coordinator's pod copies /opt/kernels there; a worker
# only needs the folder to be writable, for it compiles nothing but the resizing of pictures, in
# 2 s as it starts.
ENV PATH=/opt/dataservice/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NUMBA_CPU_NAME=${CPU_NAME} \
    NUMBA_CPU_FEATURES="" \
    NUMBA_CACHE_DIR=/tmp/numba

# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 50052 9090
STOPSIGNAL SIGTERM
ENTRYPOINT ["dataservice"]
CMD ["--help"]

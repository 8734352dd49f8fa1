# seqarch for NVIDIA GPUs. The host needs its driver and the NVIDIA Container Toolkit.
#
#   docker build -t seqarch .
#   docker run --rm --gpus all --ipc host -v "$PWD:/project" seqarch fit --config quickstart
FROM python:3.12-slim

# Triton compiles the launchers of kernels with a C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# PyTorch's packages bring the libraries of CUDA. seqarch's own code comes last, so that a change of it keeps this layer.
COPY pyproject.toml README.md LICENSE /seqarch/
COPY seqarch/__init__.py /seqarch/seqarch/
RUN mkdir /seqarch/recipes && pip install --no-cache-dir "/seqarch[gpu,eval,hf,tokenizers]"
COPY seqarch /seqarch/seqarch
COPY recipes /seqarch/recipes
RUN pip install --no-cache-dir --no-deps --force-reinstall /seqarch

# Compiled kernels stay in the mounted folder, and so do they if `docker run --user` gives a user without a home.
ENV HOME=/project USER=seqarch TRITON_CACHE_DIR=/project/.cache/triton TORCHINDUCTOR_CACHE_DIR=/project/.cache/inductor
WORKDIR /project
ENTRYPOINT ["seqarch"]
CMD ["--help"]

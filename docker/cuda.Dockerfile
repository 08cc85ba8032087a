# A machine with a GPU that can run a training over NCCL with the plugins. Build from the top of the repository:
#   docker build -f docker/cuda.Dockerfile -t netbottleneck-cuda .
# The image has nvcc, so that the core holds the kernels. It holds no steps of its own: tools/setup_env.sh does the work.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
WORKDIR /opt/netbottleneck
COPY setup.py pyproject.toml MANIFEST.in Makefile LICENSE README.md ./
COPY requirements requirements
COPY tools tools
COPY docker docker
COPY csrc csrc
COPY python python
RUN docker/cuda_setup.sh
COPY . .
ENV PATH=/opt/netbottleneck/.venv/bin:$PATH
CMD ["docker/cuda_rank.sh"]

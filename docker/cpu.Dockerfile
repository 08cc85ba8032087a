# A machine without a GPU that can run `make study` and `make test`. Build from the top of the repository:
#   docker build -f docker/cpu.Dockerfile -t netbottleneck .
FROM python:3.11-slim-bookworm
WORKDIR /opt/netbottleneck
# The set-up first, with what it reads and nothing else, so that a change of a test does not repeat it.
COPY setup.py pyproject.toml MANIFEST.in Makefile LICENSE README.md ./
COPY requirements requirements
COPY tools tools
COPY csrc csrc
COPY python python
RUN tools/setup_env.sh dev
COPY . .
RUN tools/setup_env.sh dev
ENV PATH=/opt/netbottleneck/.venv/bin:$PATH
CMD ["make", "study"]

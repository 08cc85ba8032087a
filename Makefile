# Every target calls a script that CI also calls. `make` alone lists them.
NB := .venv/bin/netbottleneck
.DEFAULT_GOAL := help
.PHONY: help setup build test test-full test-peers matrices idioms faults scenarios lint bench bench-peers gates overhead study gpu-check notebooks docs sanitize fuzz mutants cross wheel-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything: system packages (APT=0: none), .venv, torch, the C build
	@tools/setup_env.sh dev

build: ## compile changed files
	@tools/setup_env.sh run

study: ## run a study on simulated networks (replays, training, compute), and write its report
	@tools/setup_env.sh run
	@$(NB) study $(ARGS)

test: ## set up, then run all tests: C, then Python
	@tools/setup_env.sh dev
	@tools/test.sh

test-full: ## run all tests and the full matrices
	@tools/setup_env.sh dev
	@tools/test.sh full

matrices: ## run only the full matrices
	@tools/setup_env.sh dev
	@tools/test.sh matrices

test-peers: ## run the tests that need MPI launchers, iperf3, oneCCL or NCCL, and the Lightning, Transformers and Accelerate examples
	@tools/setup_env.sh dev
	@tools/test.sh peers

idioms: ## compare training loops bit for bit, untouched and in each mode (ARGS=--quick, TORCH=2.x.y)
	@tools/setup_env.sh run
	@TORCH=$(TORCH) tools/idioms.sh $(ARGS)

faults: ## run the faults matrix: outcomes, times and leftovers (ARGS="--only kill,stop --networks tcp")
	@tools/setup_env.sh run
	@tools/faults.sh $(ARGS)

scenarios: ## check verdicts and lengths of jobs with known answers, 40 minutes (SEED=n, ARGS="--only WORDS")
	@tools/setup_env.sh run
	@.venv/bin/python tests/scenarios/run.py --seed $(or $(SEED),1) --live --known 50 --lengths 5 $(ARGS)

docs: ## build the documentation into build/docs; warnings are errors
	@tools/setup_env.sh dev
	@tools/docs.sh

lint: ## check format, clang-tidy, ruff, mypy, sizes, layers, binary, docs
	@tools/setup_env.sh dev
	@tools/lint.sh

sanitize: ## run the C tests under ASan+UBSan, then under TSan, some under valgrind, then the fuzzers briefly
	@tools/setup_env.sh dev
	@tools/sanitize.sh

fuzz: ## fuzz the parsers of peer data (ARGS=SECONDS per target)
	@tools/setup_env.sh dev
	@tools/fuzz.sh $(ARGS)

mutants: ## test random mutants for hours; an interrupted run resumes (ARGS="--number N --rooms ROOM …")
	@tools/setup_env.sh dev
	@.venv/bin/python tools/mutants.py $(ARGS)

cross: ## build for aarch64, and run the C tests of kernels, schedules, lanes and the trace under qemu
	@tools/setup_env.sh dev
	@tools/cross.sh

wheel-check: ## build a wheel, and run study, report and a notebook from it in a clean environment
	@tools/setup_env.sh dev
	@tools/wheel_check.sh

bench: ## measure all-reduce over stock, tcp and ofi on loopback (ARGS="--lab 2gbit/500mbit …")
	@tools/setup_env.sh run
	@$(NB) bench --ranks 2 $(ARGS)

bench-peers: ## compare with gloo, Open MPI, iperf3 and memory limits, as far as installed; table, JSON, plot
	@tools/setup_env.sh run
	@tools/peers.sh
	@$(NB) bench --ranks 2 --peers benchmarks/peers --sizes 1M,16M,64M,256M --iters 4 --json build/peers.json $(ARGS)
	@.venv/bin/python benchmarks/picture.py build/peers.json build/peers.svg

gates: ## measure the ten gates of the transports (ARGS="--only T1,T3"); needs an idle machine for an hour
	@tools/setup_env.sh run
	@tools/peers.sh
	@.venv/bin/python benchmarks/transport.py --gates --json build/gates.json --plot build/gates.svg $(ARGS)

overhead: ## measure our overhead: gradient hooks, measuring, a 4-byte all-reduce, a start; needs an idle machine for 5 minutes
	@tools/setup_env.sh run
	@.venv/bin/python benchmarks/overhead.py --json build/overhead.json $(ARGS)

gpu-check: ## check what needs a GPU, 8 minutes; results in benchmarks/results (ARGS="--only versions,nccl"); 77 without a GPU
	@tools/gpu_check.sh $(ARGS)

notebooks: ## execute the notebooks in benchmarks/notebooks
	@tools/setup_env.sh run
	@tools/notebooks.sh

clean: ## remove build results; keep .venv
	@rm -rf build dist python/*.egg-info python/netbottleneck/*.so python/netbottleneck/lab/*.so
	@find python tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Every target calls a script that CI also calls. `make` alone lists them.
NB := .venv/bin/netbottleneck
.DEFAULT_GOAL := help
.PHONY: help setup build test test-full test-peers matrices idioms faults lint bench bench-peers gates overhead study notebooks docs sanitize fuzz mutants cross wheel-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## set everything up: packages (APT=0: none), .venv, torch, the C build
	@tools/setup_env.sh dev

build: ## compile what has changed
	@tools/setup_env.sh run

study: ## the chain of evidence on networks made here: replays, training, compute; the answer, and a report
	@tools/setup_env.sh run
	@$(NB) study $(ARGS)

test: ## set up, then all tests: C, then Python
	@tools/setup_env.sh dev
	@tools/test.sh

test-full: ## the full matrices too
	@tools/setup_env.sh dev
	@tools/test.sh full

matrices: ## the full matrices alone
	@tools/setup_env.sh dev
	@tools/test.sh matrices

test-peers: ## the tests with MPI's launchers, iperf3 and oneCCL, and the examples with Lightning, Transformers and Accelerate
	@tools/setup_env.sh dev
	@tools/test.sh peers

idioms: ## every way of writing a training loop, untouched and in each mode, compared bit for bit (ARGS=--quick, TORCH=2.x.y)
	@tools/setup_env.sh run
	@TORCH=$(TORCH) tools/idioms.sh $(ARGS)

faults: ## faults × transports × ranks: outcomes, times, and what is left behind (ARGS="--only kill,stop --networks tcp")
	@tools/setup_env.sh run
	@tools/faults.sh $(ARGS)

docs: ## build the documentation into build/docs; warnings are errors
	@tools/setup_env.sh dev
	@tools/docs.sh

lint: ## format, clang-tidy, ruff, mypy, sizes, layers, binary, docs
	@tools/setup_env.sh dev
	@tools/lint.sh

sanitize: ## the C tests under ASan+UBSan, then under TSan, then a moment of fuzzing
	@tools/setup_env.sh dev
	@tools/sanitize.sh

fuzz: ## fuzz what parses bytes of a peer (ARGS=SECONDS, of each target)
	@tools/setup_env.sh dev
	@tools/fuzz.sh $(ARGS)

mutants: ## draw mutants and run the tests of their rooms: hours; a run that was stopped goes on (ARGS="--number N --rooms ROOM …")
	@tools/setup_env.sh dev
	@.venv/bin/python tools/mutants.py $(ARGS)

cross: ## build for aarch64, and run there under qemu the C tests of kernels, schedules, lanes and the record
	@tools/setup_env.sh dev
	@tools/cross.sh

wheel-check: ## build a wheel; study, report and a notebook from it, in a clean environment elsewhere
	@tools/setup_env.sh dev
	@tools/wheel_check.sh

bench: ## all-reduce over stock, tcp and ofi on loopback (ARGS="--lab 2gbit/500mbit …")
	@tools/setup_env.sh run
	@$(NB) bench --ranks 2 $(ARGS)

bench-peers: ## the same beside gloo, Open MPI, iperf3 and memory's limits, as far as they are there; table, JSON, plot
	@tools/setup_env.sh run
	@tools/peers.sh
	@$(NB) bench --ranks 2 --peers benchmarks/peers --sizes 1M,16M,64M,256M --json build/peers.json $(ARGS)
	@.venv/bin/python benchmarks/picture.py build/peers.json build/peers.svg

gates: ## the transports' ten gates (ARGS="--only T1,T3"); a quiet machine, and an hour
	@tools/setup_env.sh run
	@tools/peers.sh
	@.venv/bin/python benchmarks/transport.py --gates --json build/gates.json --plot build/gates.svg $(ARGS)

overhead: ## what being there costs: a gradient's hook, measuring, a tiny all-reduce, a start; a quiet machine, 5 minutes
	@tools/setup_env.sh run
	@.venv/bin/python benchmarks/overhead.py --json build/overhead.json $(ARGS)

notebooks: ## execute the notebooks in benchmarks/notebooks
	@tools/setup_env.sh run
	@tools/notebooks.sh

clean: ## remove what was built; .venv stays
	@rm -rf build dist python/*.egg-info python/netbottleneck/*.so python/netbottleneck/lab/*.so
	@find python tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Measured results, and what README.md and docs show of them.
PYTHON = python
RESULTS = $(shell $(PYTHON) -c "import sys; sys.path.insert(0, 'scripts'); import results; print(*results.MADE)")
QUICK_ = $(if $(QUICK),--quick) $(if $(INTO),--into $(INTO))

.PHONY: help results figures docs

help:
	@echo "make results          measure everything again, on a quiet machine; QUICK=1 INTO=DIRECTORY to try it"
	@echo "make result-NAME      one of: $(RESULTS)"
	@echo "make figures          write all tables and draw all pictures, from the result files"
	@echo "make figures-PART     one of: tables drawings filters report training zoo"
	@echo "make docs             build the site; SITE=DIRECTORY to build it there"

results:
	$(PYTHON) scripts/results.py $(QUICK_)

result-%:
	$(PYTHON) scripts/results.py $(QUICK_) $*

figures:
	$(PYTHON) scripts/figures.py

figures-%:
	$(PYTHON) scripts/figures.py $*

docs:
	mkdocs build --strict --site-dir $(or $(SITE),site)

.PHONY: demo test test-all check bench clean

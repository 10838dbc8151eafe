"""all-MiniLM-L6-v2 in an engine-style TP=2 model, loaded by plan: `python -m examples.minilm`."""

import os

# Tests touch no network, and libraries cache nothing outside the test's own folders.
os.environ["HF_HUB_OFFLINE"] = "1"

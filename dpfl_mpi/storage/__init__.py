"""Files that survive a full disk and a kill."""

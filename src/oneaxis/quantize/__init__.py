"""SmoothQuant and INT8: from activation statistics to a quantised checkpoint and what it cost."""

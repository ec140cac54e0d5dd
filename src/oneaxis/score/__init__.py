"""Multiple choice by log-probability: one table of every option in every context, and scorers that only read it."""

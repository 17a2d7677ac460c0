"""The paper's experiments, and the data sets and models they train on."""

"""What is trained: networks, workloads, and the data that they are trained on."""

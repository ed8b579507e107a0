"""Records for experiment trackers: TensorBoard, Weights & Biases and MLflow."""

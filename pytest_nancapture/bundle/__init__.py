"""What a bundle is on disk: manifest, files, hashes, tensors, batch trees, random states."""

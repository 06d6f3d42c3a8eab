"""What one rank prints and keeps."""

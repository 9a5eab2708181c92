"""Files and folders on disk: what each kind holds, read and checked."""

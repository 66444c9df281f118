"""From records to pages: tables and pictures of what is in results/, and nothing that is not."""

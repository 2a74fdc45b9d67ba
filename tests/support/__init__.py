"""What tests of several packages share: processes, hosts, a browser, made-up runs, and plain models to compare with."""

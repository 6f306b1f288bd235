// A page that is opened from a folder may start no worker: there, the search's script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        this.frame.onload = () => {
          const inner = this.frame.contentWindow;
          inner.postMessage = (data) => {
            const copy = structuredClone(data); // as between threads: neither side sees what the other changes later
            setTimeout(() => this.onmessage?.({ data: copy }));
          };
          const script = inner.document.createElement("script");
          script.src = new URL(address, location);
          script.onload = () => resolve(inner);
          script.onerror = () => this.onerror?.(new Event("error"));
          inner.document.body.append(script);
        };
      });
      document.body.append(this.frame);
    }
    postMessage(data) {
      const copy = structuredClone(data);
      this.loaded.then((inner) => inner.onmessage({ data: copy }));
    }
    terminate() {
      this.frame.remove();
    }
  };

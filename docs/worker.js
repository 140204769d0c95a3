// A page that was opened from a folder may start no Worker: browsers refuse files. The search of the theme needs one.
// There its program runs in a hidden frame, which has the two things that it uses of a Worker: messages and importScripts.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const inner = (this.inner = frame.contentWindow)
      const load = address => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        Object.assign(script, { src: address, onload: resolve, onerror: reject })
        inner.document.body.appendChild(script)
      })
      inner.importScripts = (...addresses) => addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve())
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = load(url)
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}

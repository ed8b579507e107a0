// Browsers start no worker from a disk, as the search is: there a frame that runs its script stands
// in for one. The theme's script asks for IFrameWorker by that name.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const inside = frame.contentWindow
      const load = src => new Promise((loaded, failed) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src, onload: loaded, onerror: failed })
        inside.document.body.append(script)
      })
      inside.importScripts = (...urls) => Promise.all(urls.map(load))
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const ready = load(url)
      this.postMessage = data =>
        ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}
